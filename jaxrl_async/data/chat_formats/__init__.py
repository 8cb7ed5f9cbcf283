"""Encoders of chat messages as token ids."""
