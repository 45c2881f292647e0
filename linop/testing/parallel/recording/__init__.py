"""One step of a torch program and of its twin, recorded on each rank: tensors, calls, collectives,
the elements that functions move, and the processes in which that is done."""
