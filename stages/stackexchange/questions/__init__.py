"""Join posts to questions with scored answers, out of core."""
