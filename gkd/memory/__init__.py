"""Memory of a rank: where its states are, how much is in use, who holds it, and what to do when there is too little."""
