"""Arrays of a device, and messages between devices."""
