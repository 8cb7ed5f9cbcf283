"""The weights' way from the trainer to samplers in the same process."""
