"""What carries the messages of a session: sockets or gRPC between processes, queues inside one."""
