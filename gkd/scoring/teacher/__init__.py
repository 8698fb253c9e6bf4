"""The trainer's side of the teacher: what a teacher is, teachers of the teacher server and of HTTP servers."""
