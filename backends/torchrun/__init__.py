"""The medium torch.distributed: processes of a process group."""
