"""Arrays of a device, copies between device and host memory, and messages between devices."""
