"""LoRA adapters as files: what is accepted, their versions, and the folder that is watched."""
