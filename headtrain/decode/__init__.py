"""Lossless speculative decoding on the target: drafters, verification, the loops."""
