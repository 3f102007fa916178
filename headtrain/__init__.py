"""headtrain: train, measure and export self-draft heads for speculative decoding."""

__version__ = "0.1.0"
