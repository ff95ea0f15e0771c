"""fusestep: train transformers as fast as the chip allows, and know what each speed-up bought."""
