"""Read what the files of a pretrained model say, before anything is loaded. Never imports torch."""
