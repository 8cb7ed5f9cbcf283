"""Models with image inputs."""
