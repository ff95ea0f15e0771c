"""NVIDIA Apex's names, served by fusestep."""
