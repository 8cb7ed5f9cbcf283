"""Families of models, one record each."""
