"""What runs methods: the front door, devices, memory, forks, shared prompts."""
