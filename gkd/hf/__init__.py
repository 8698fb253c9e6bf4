"""Hugging Face model folders: index, safetensors files, sizes from config.json."""
