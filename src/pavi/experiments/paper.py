"""Numbers that the paper prints, for comparison with ours."""

# tab:scaling: groups -> method -> (ELBO, weights, seconds on a V100). ELBOs in nats; "exact" is its asymptotic ELBO.
SCALING: dict[int, dict[str, tuple[float, int | None, float | None]]] = {
    2: {
        "ADAVI (sa)": (18.8, 12_280, 503),
        "CF (sa)": (14.8, 2_275, 228),
        "CF": (19.8, 355, 63),
        "UIVI": (21.1, 2_764, 220),
        "PAVI-F": (21.4, 4_058, 65),
        "PAVI-E (sa)": (20.3, 27_394, 140),
        "PAVI-E": (17.4, 27_394, 37),
        "exact": (22.0, None, None),
    },
    20: {
        "ADAVI (sa)": (216, 12_280, 800),
        "CF (sa)": (173, 21_751, 1_612),
        "CF": (226, 2_551, 404),
        "UIVI": (239, 14_676, 230),
        "PAVI-F": (238, 4_202, 72),
        "PAVI-E (sa)": (223, 27_394, 145),
        "PAVI-E": (184, 27_394, 50),
        "exact": (241, None, None),
    },
    200: {
        "ADAVI (sa)": (2_217, 12_280, 1_600),
        "CF (sa)": (1_757, 216_511, 12_000),
        "CF": (2_286, 24_511, 2_600),
        "UIVI": (2_412, 139_300, 240),
        "PAVI-F": (2_377, 5_642, 81),
        "PAVI-E (sa)": (2_270, 27_394, 150),
        "PAVI-E": (2_242, 27_394, 85),
        "exact": (2_434, None, None),
    },
}
# tab:GM, tab:HV, tab:HCPL: method -> (ELBO, its standard deviation, seconds); None where the paper has no number.
Entry = tuple[int, int, int] | None
MIXTURE: dict[str, Entry] = {
    "CF": (-162, 29, 3_100),
    "ADAVI": (-200, 23, 3_000),
    "UIVI": (-263, 12, 500),
    "PAVI-E": (-152, 28, 470),
    "PAVI-F": (-111, 11, 300),
}
VARIANCE: dict[str, Entry] = {
    "CF": (-1_120, 290, 500),
    "UIVI": (-670, 80, 100),
    "PAVI-E": (-670, 100, 90),
    "PAVI-F": (-670, 80, 20),
}
NEUROIMAGING: dict[str, Entry] = {
    "CF": (-1_397_000, 210_000, 3_200),
    "ADAVI": None,
    "UIVI": None,
    "PAVI-F": (-82_000, 1_000, 1_600),
}
