"""`arraycomm demo`: train one model on several ranks, in several frameworks, and check it."""
