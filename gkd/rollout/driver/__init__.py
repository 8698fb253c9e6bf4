"""Drive the engines: queue of prompts, merged chunks, weight sync, restart of engines that died or hang."""
