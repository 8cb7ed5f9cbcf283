"""How a run starts, admits and ends samplers in other processes."""
