"""Fourier transforms of global tensors: local transforms between repartitions."""

from linop.fourier.real import irfft, rfft
from linop.fourier.spectral import low_modes, spectral_convolution
from linop.fourier.transform import fft

__all__ = ["fft", "irfft", "low_modes", "rfft", "spectral_convolution"]
