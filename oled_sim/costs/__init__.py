"""Hardware cost profiles and the lane costs the engine reads from them.

``profile`` defines the file, ``store`` reads and writes it, ``lanes`` answers what things cost,
``tables`` answers the same inside compiled kernels, ``synthetic`` makes profiles by formula.
"""
