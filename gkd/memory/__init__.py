"""Memory of a device that several roles share in time: moving states away and back, and seeing who holds what."""
