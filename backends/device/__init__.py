"""Arrays of a device, and copies between device and host memory."""
