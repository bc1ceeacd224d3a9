"""Write train.csv and valid.csv: short texts, whether they tell of a disaster, and who wrote them.

Words alone do not tell "the fire on main street" from "the fire in this song": an account with many
followers and a link tells of events more often. A fifth of the numbers is missing.
"""

import csv

import numpy as np

PLAIN = ["lunch", "concert", "song", "friends", "weekend", "game", "party"]
EVENTS = ["fire", "flood", "storm", "crash", "smoke"]
PLACES = ["on main street", "in the valley", "near the bridge", "at home", "in town"]


def tweets(count, rng):
    for _ in range(count):
        followers, link = int(np.exp(rng.normal(6, 2))), int(rng.random() < 0.5)
        names_event = rng.random() < 0.7
        word = rng.choice(EVENTS if names_event else PLAIN)
        is_news = np.log1p(followers) - 6 + 3 * (link - 0.5) + rng.normal(0, 0.5) > 0
        sides = ("" if rng.random() < 0.2 else x for x in (followers, link))
        yield f"the {word} {rng.choice(PLACES)}", *sides, int(names_event and is_news)


for name, count, seed in (("train", 4000, 0), ("valid", 1000, 1)):
    with open(f"{name}.csv", "w", newline="") as file:
        rows = tweets(count, np.random.default_rng(seed))
        csv.writer(file).writerows([("text", "followers", "link", "label"), *rows])
