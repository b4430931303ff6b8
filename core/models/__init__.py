"""Denoiser families and their conditioning; presets and profiles, which need no torch."""
