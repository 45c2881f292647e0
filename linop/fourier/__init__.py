"""Fourier transforms of global tensors: local transforms between repartitions."""

from linop.fourier.spectral import spectral_convolution
from linop.fourier.transform import fft

__all__ = ["fft", "spectral_convolution"]
