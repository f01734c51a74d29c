"""Models, adapters, and layers that train faster."""
