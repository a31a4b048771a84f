"""What a run folder says about its run: as a page, as a picture, in the terminal."""
