"""Workers together, whatever medium connects them: what they all agree on or all raise, alarms,
deadlocks, the last calls of each, and the format of what they say to each other."""
