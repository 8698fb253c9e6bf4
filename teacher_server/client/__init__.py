"""Client of a broker: a connection, requests and their checks, the thread that sends and resends them."""
