"""The instructions of messages: the interface that supplies them, and those of messages that go
through a worker's transport, whichever it is."""
