"""Weight transfer from the trainer to samplers in the same process."""
