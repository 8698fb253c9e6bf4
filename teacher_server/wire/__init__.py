"""Messages between clients, broker and workers: headers, payloads, keys, sockets. The trainer imports this."""
