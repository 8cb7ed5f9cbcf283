"""The weights' way to samplers in other processes."""
