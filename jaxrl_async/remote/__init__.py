"""Wing: samplers and trainers in other processes (mesh.samplers_in, remote)."""
