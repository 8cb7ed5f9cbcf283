"""Test doubles: scripted clocks, samplers and faults."""
