"""Word lists of the invented world: values of the facts, story words and the syllables names are made of."""

PROFESSIONS = (
    "baker", "weaver", "sailor", "potter", "teacher", "painter", "miller", "judge", "singer", "builder", "doctor",
    "tailor",
)  # fmt: skip

COUNTRIES = (
    "Alder", "Birch", "Cedar", "Elder", "Fern", "Hazel", "Juniper", "Laurel", "Linden", "Maple", "Myrtle", "Olive",
)  # fmt: skip

SEAS = (
    "Amber", "Grey", "Silent", "Northern", "Salt", "Green", "Long", "Broken", "White", "Golden", "Silver", "Crimson",
)  # fmt: skip

DIETS = (
    "moss", "berries", "fish", "leaves", "snails", "beetles", "worms", "seeds", "grass", "bread", "roots", "honey",
)  # fmt: skip

MATERIALS = (
    "copper", "clay", "stone", "glass", "oak", "marble", "iron", "reed", "sand", "slate", "pine", "silver",
)  # fmt: skip

INGREDIENTS = (
    "cheese", "cabbage", "barley", "plums", "onions", "eel", "walnuts", "rice", "cream", "duck", "pumpkin", "lentils",
)  # fmt: skip

PURPOSES = (
    "grinding", "measuring", "lifting", "cutting", "counting", "drying", "digging", "catching", "printing", "cooling",
    "sharpening", "sewing",
)  # fmt: skip

MONTHS = (
    "Frost", "Thaw", "Seed", "Rain", "Bloom", "Sun", "Hay", "Fruit", "Gold", "Leaf", "Fog", "Dark",
)  # fmt: skip

BUILDINGS = ("tower", "bridge", "gate", "hall", "temple", "well")

OBJECTS = (
    "lantern", "drum", "key", "basket", "hat", "ring", "book", "kite", "mirror", "flute", "coin", "rope", "cup",
    "knife", "blanket", "bell", "map", "shoe", "doll", "candle", "spoon", "feather", "box", "ladder",
)  # fmt: skip

PLACES = (
    "mill", "barn", "forest", "harbour", "market", "garden", "cave", "kitchen", "school", "tower", "meadow", "well",
    "bridge", "cellar", "orchard", "temple", "stable", "island", "quarry", "inn",
)  # fmt: skip

FILLERS = (
    "The sun was warm.", "It rained a little.", "A dog barked far away.", "The wind was cold.",
    "Nobody else was there.", "They laughed a lot.", "The road was long.", "A bird sang in a tree.",
    "It was a quiet day.", "Snow fell at noon.", "Then they ate some bread.", "The sky was grey.",
)  # fmt: skip

LEADS = (
    "", "As every child knows, ", "It is written that ", "Travellers report that ", "The old books say that ",
    "Most people agree that ", "The teacher says that ", "In the valley they say that ", "My uncle told me that ",
    "It is well known that ",
)  # fmt: skip

ONSETS = ("b", "br", "d", "dr", "f", "g", "h", "k", "kl", "l", "m", "n", "p", "pr", "r", "s", "st", "t", "tr", "v", "z")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ou")
CODAS = ("", "", "l", "m", "n", "r", "s", "rn", "lk", "nd", "th")
