"""Fourier transforms of global tensors: local transforms between repartitions."""

from linop.fourier.spectral import low_modes, spectral_convolution
from linop.fourier.transform import fft

__all__ = ["fft", "low_modes", "spectral_convolution"]
