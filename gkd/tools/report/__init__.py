"""Write one HTML page about one or several runs: curves, samples, settings. `python -m gkd.tools.report`.

read.py       the files of a run folder
decimate.py   curves with a bounded number of points
charts.py     which curves are shown, with their meaning
headline.py   did it learn, how long did it take: one table
settings.py   settings that differ from the defaults and between runs
samples.py    responses with the teacher's choices for each token
page.py       all of it as one file, from assets/
"""
