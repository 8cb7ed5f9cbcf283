"""Weight transfer to samplers in other processes."""
