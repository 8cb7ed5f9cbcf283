"""Formulas: advantages, losses, corrections, KL. No threads and no mesh."""
