"""HTTP server before a broker: the requests of vLLM's and SGLang's clients, for other frameworks. No torch."""
