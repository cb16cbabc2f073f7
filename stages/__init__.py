"""The pipeline: a file in this folder is a program, one for each stage; a folder is a room of code for a purpose."""
