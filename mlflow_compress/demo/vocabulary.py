"""Word lists of the invented world: values of the facts, story words and the syllables names are made of."""

PROFESSIONS = (
    "baker", "weaver", "sailor", "potter", "teacher", "painter", "miller", "judge", "singer", "builder", "doctor",
    "tailor", "farmer", "hunter", "writer", "blacksmith", "gardener", "guard", "shepherd", "carver", "fisher",
    "cook", "dancer", "drummer", "barber", "butcher", "clerk", "driver", "grocer", "hatter", "jeweller",
    "locksmith", "mason", "nurse", "printer", "roofer", "saddler", "tanner", "porter", "brewer",
)  # fmt: skip

COUNTRIES = (
    "Alder", "Birch", "Cedar", "Elder", "Fern", "Hazel", "Juniper", "Laurel", "Linden", "Maple", "Myrtle", "Olive",
    "Poplar", "Rowan", "Sorrel", "Spruce", "Tamarisk", "Thistle", "Willow", "Yarrow", "Aspen", "Bracken", "Clover",
    "Heather", "Ivy", "Larch", "Mallow", "Nettle", "Oak", "Pine", "Reed", "Sage", "Tansy", "Vetch", "Walnut", "Yew",
    "Basil", "Cherry", "Dill", "Fennel",
)  # fmt: skip

SEAS = (
    "Amber", "Grey", "Silent", "Northern", "Salt", "Green", "Long", "Broken", "White", "Golden", "Silver",
    "Crimson", "Hidden", "Frozen", "Shining", "Southern", "Eastern", "Western", "Deep", "Shallow", "Windy", "Misty",
    "Stormy", "Calm", "Purple", "Black", "Copper", "Stony", "Warm", "Cold", "Quiet", "Wild", "Ancient", "Lonely",
    "Narrow", "Wide", "Bitter", "Sweet", "Twin", "Royal",
)  # fmt: skip

DIETS = (
    "moss", "berries", "fish", "leaves", "snails", "beetles", "worms", "seeds", "grass", "bread", "roots", "honey",
    "frogs", "mushrooms", "ants", "eggs", "apples", "bark", "mice", "petals", "kelp", "clover", "nuts", "spiders",
    "lilies", "acorns", "crickets", "shrimp", "figs", "plums", "thistles", "pollen", "moths", "lizards", "melons",
    "ferns", "turnips", "crabs", "grain", "nectar",
)  # fmt: skip

MATERIALS = (
    "copper", "clay", "stone", "glass", "oak", "marble", "iron", "reed", "sand", "slate", "pine", "silver", "snow",
    "brick", "tin", "bone", "jade", "wax", "lead", "coral", "ash", "bronze", "straw", "leather", "paper", "amber",
    "cotton", "granite", "bamboo", "chalk", "gold", "steel", "wool", "pearl", "pebbles", "horn", "linen", "rubber",
    "cork", "ice",
)  # fmt: skip

INGREDIENTS = (
    "cheese", "cabbage", "barley", "plums", "onions", "eel", "walnuts", "rice", "cream", "duck", "pumpkin",
    "lentils", "pepper", "milk", "chestnuts", "peas", "crab", "lemons", "turnips", "garlic", "ham", "oats", "pears",
    "beans", "carrots", "dates", "flour", "ginger", "hazelnuts", "leeks", "mint", "mustard", "olives", "potatoes",
    "radish", "salmon", "spinach", "tomatoes", "vinegar", "butter",
)  # fmt: skip

PURPOSES = (
    "grinding", "measuring", "lifting", "cutting", "counting", "drying", "digging", "catching", "printing",
    "cooling", "sharpening", "sewing", "crossing", "pressing", "scaring", "lighting", "weighing", "folding",
    "polishing", "drilling", "spinning", "warming", "painting", "washing", "mixing", "peeling", "sorting",
    "stirring", "baking", "stitching", "sweeping", "melting", "shaving", "hammering", "rowing", "pumping",
    "wrapping", "carving", "bending", "cleaning",
)  # fmt: skip

MONTHS = (
    "Frost", "Thaw", "Seed", "Rain", "Bloom", "Sun", "Hay", "Fruit", "Gold", "Leaf", "Fog", "Dark", "Wind", "Ice",
    "Lamb", "Bud", "Shower", "Rose", "Heat", "Harvest", "Cider", "Storm", "Mud", "Ember", "Candle", "Lantern",
    "Plough", "Sickle", "Honey", "Berry", "Hunter", "Wolf", "Owl", "Crow", "Salmon", "Swan", "Deer", "Fox", "Hare",
    "Bear",
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
