"""Reports on runs from their run folders: as a page, as a picture, in the terminal."""
