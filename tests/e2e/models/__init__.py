"""Tiny models with random weights, one per kind of attention that llama.cpp has."""
