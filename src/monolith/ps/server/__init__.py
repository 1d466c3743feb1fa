"""The server: what it holds, keeps in its folder, and does when it is called."""
