"""What carries the messages of a session: gRPC between processes, queues inside one."""
