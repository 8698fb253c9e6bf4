"""Drive the engines: queue of prompts, merged chunks, restart of engines that died or hang."""
