"""The words of the generated databases: subjects and their entities, attributes and their values.

An entity carries one letter, which decides the attributes that make sense for it: ``p`` a person or an animal, ``l`` a
place, ``t`` a thing, ``e`` an event, ``o`` an organisation. No name is an SQL keyword, so none is ever quoted, and
nouns with an irregular plural are left out: a policy of a million parameters has better things to learn.

The subjects in ``NEW_SUBJECTS`` are kept apart: no database about them is ever trained on.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "ADJECTIVES",
    "CATEGORIES",
    "FAMILIAR_SUBJECTS",
    "FIRST_NAMES",
    "LAST_NAMES",
    "MODIFIERS",
    "NEW_SUBJECTS",
    "NUMBERS",
    "SUBJECTS",
    "SYLLABLES",
    "THINGS",
    "Category",
    "Number",
    "words",
]


class Number(NamedTuple):
    """A numeric attribute: its range, the kinds of entity it suits, and its adjectives where it has any."""

    low: int
    high: int
    kinds: str
    most: str = ""
    least: str = ""
    more: str = ""
    less: str = ""


class Category(NamedTuple):
    """An attribute with few values: the kinds of entity it suits, and the values."""

    kinds: str
    values: list[str]


_SUBJECTS = """
music: singer/p song/t concert/e album/t band/o festival/e drummer/p
school: student/p course/t teacher/p classroom/l exam/e scholarship/t club/o
pets: dog/p owner/p kennel/l vet/p treatment/e cat/p parrot/p
flights: airport/l flight/e airline/o pilot/p aircraft_model/t passenger/p runway/l
company: employee/p department/o project/t manager/p office/l meeting/e intern/p
shop: product/t customer/p purchase/e supplier/o store/l invoice/t coupon/t
library: book/t author/p publisher/o reader/p loan/e magazine/t editor/p
cinema: movie/t actor/p director/p cinema/l ticket/t premiere/e critic/p
hospital: doctor/p patient/p nurse/p hospital/l medicine/t appointment/e ward/l
football: player/p team/o coach/p game/e league/o referee/p goalkeeper/p
geography: mountain/l river/l island/l lake/l volcano/l desert/l glacier/l
bank: account/t client/p bank/o deposit/e card/t teller/p mortgage/t
cars: car/t maker/o dealer/p driver/p race/e engine/t tire/t
farm: farm/l farmer/p crop/t animal/p tractor/t harvest/e barn/l
museum: museum/l visitor/p exhibit/e artist/p painting/t sculpture/t curator/p
television: channel/o program/t cartoon/t episode/t host/p presenter/p broadcast/e
hotel: hotel/l guest/p room/l booking/e receptionist/p suite/l resort/l
election: candidate/p voter/p election/e poll/e senator/p district/l campaign/e
software: developer/p device/t app/t browser/t server/t release_note/t bug/t
trains: train/t station/l conductor/p platform/l wagon/t journey/e tunnel/l
theater: theater/l dancer/p orchestra/o musician/p opera/t rehearsal/e costume/t
housing: house/l apartment/l tenant/p landlord/p agent/p building/l lease/e
kitchen: kitchen/l chef/p kettle/t oven/t blender/t pan/t spoon/t
zoo: zoo/l keeper/p tiger/p elephant/p cage/l penguin/p monkey/p
newspaper: newspaper/o journalist/p article/t editorial/t photographer/p headline/t interview/e
sea: ship/t captain/p harbor_dock/l sailor/p voyage/e cargo/t lighthouse/l
cycling: bike/t cyclist/p stage/e sponsor/o trail/l helmet/t jersey/t
tennis: court_surface/t umpire/p tournament/e racket/t champion/p stadium/l opponent/p
chess: grandmaster/p opening/t board/t puzzle/t clock/t arbiter/p simul/e
forest: forest/l tree/t ranger/p cabin/l bird/p hike/e squirrel/p
weather: forecast/e storm/e sensor/t climate_zone/l hurricane/e flood/e balloon/t
energy: reactor/t turbine/t panel/t dam/l technician/p outage/e grid/t
mining: mine/l miner/p mineral/t shaft/l truck/t blast/e drill/t
police: officer/p suspect/p arrest/e precinct/l victim/p patrol/e vehicle/t
fire: firefighter/p hydrant/t rescue/e alarm/t ladder/t brigade/o hose/t
army: soldier/p battle/e regiment/o general_officer/p tank/t fort/l mission_order/e
post: parcel/t courier/p mailbox/t postcard/t stamp/t depot/l post_office/l
telecom: phone/t subscriber/p antenna/t operator/o contract/t router/t voicemail/e
insurance: policy/t broker/p claim/e insurer/o accident/e premium_offer/t adjuster/p
tax: taxpayer/p auditor/p refund/e taxform/t inspector/p deduction/t audit/e
charity: donor/p charity_fund/o donation/e volunteer/p fundraiser/e shelter/l orphan/p
wedding: bride/p groom/p wedding/e florist/p cake/t caterer/o venue/l
travel: tourist/p tour/e guide/p landmark/l hostel/l suitcase/t cruise/e
beach: beach/l lifeguard/p surfer/p wave_report/e umbrella/t surfboard/t kayak/t
ski: slope/l skier/p lift/t snowboard/t instructor/p chalet/l avalanche/e
garden: garden/l gardener/p flower/t seed/t shrub/t greenhouse/l fountain/t
bakery: bakery/l baker/p bread/t pastry_item/t muffin/t flour/t cookie/t
coffee: cafe/l barista/p espresso/t bean/t roaster/p teapot/t mug/t
medicine: drug/t pharmacist/p trial/e symptom/t vaccine/t disorder/t dose/e
dentist: dentist/p clinic/l implant/t checkup/e hygienist/p crown/t brace/t
science: scientist/p experiment/e laboratory_site/l microscope/t paper/t grant/t professor/p
math: theorem/t mathematician/p proof/t conjecture/t seminar/e lecture/e notebook/t
fashion: dress/t designer/p fabric/t shoe/t boutique/l jacket/t perfume/t
jewelry: ring/t jeweler/p diamond/t necklace/t bracelet/t gemstone/t auction/e
gaming: gamer/p console/t quest/e dungeon/l weapon/t wizard/p dragon/p
history: king/p empire/o castle/l treaty_text/t monument/l knight/p siege/e
gym: gym/l trainer/p membership/t workout/e athlete/p medal/t swimmer/p
restaurant: restaurant/l dish/t cook/p menu/t diner/p recipe/t ingredient/t
wine: wine/t vineyard/l grape/t cellar/l taster/p bottle/t barrel/t
law: lawyer/p judge/p hearing/e prisoner/p crime/e witness/p prison/l
space: planet/l rocket/t astronaut/p satellite/t telescope/t comet/t launch/e
construction: bridge/l architect/p crane/t contractor/o worker/p brick/t skyscraper/l
robotics: robot/t inventor/p gadget/t circuit/t actuator/t drone/t patent/t
circus: clown/p acrobat/p circus/o juggler/p tent/l trick/t magician/p
fishing: angler/p boat/t reef/l net/t salmon/t trawler/t lagoon/l
art: easel/t painter/p sketch/t mural/t portrait/t collector/p workshop/e
podcast: podcast/t listener/p speaker/p microphone/t playlist/t transcript/t recording/e
recycling: bin/t collector_truck/t landfill/l container/t sorter/p pickup/e magnet/t
"""

NEW_SUBJECTS = (
    *("gym", "restaurant", "wine", "law", "space", "construction"),
    *("robotics", "circus", "fishing", "art", "podcast", "recycling"),
)


def _parse(text: str) -> dict[str, dict[str, str]]:
    subjects = {}
    for line in text.strip().splitlines():
        subject, _, entities = line.partition(": ")
        subjects[subject] = dict(entity.split("/") for entity in entities.split())
    return subjects


SUBJECTS: dict[str, dict[str, str]] = _parse(_SUBJECTS)
"""Subject to its entities, each with its kind."""
FAMILIAR_SUBJECTS = tuple(subject for subject in SUBJECTS if subject not in NEW_SUBJECTS)

NUMBERS: dict[str, Number] = {
    "age": Number(18, 80, "p", "oldest", "youngest", "older", "younger"),
    "salary": Number(20, 99, "p", "best paid", "worst paid"),
    "height": Number(50, 250, "plt", "tallest", "shortest", "taller", "shorter"),
    "weight": Number(10, 400, "pt", "heaviest", "lightest", "heavier", "lighter"),
    "experience": Number(1, 40, "p", "most experienced", "least experienced"),
    "bonus": Number(1, 90, "p"),
    "wins": Number(0, 40, "po"),
    "losses": Number(0, 40, "po"),
    "points": Number(0, 99, "po"),
    "rank": Number(1, 60, "pto"),
    "score": Number(1, 100, "pte"),
    "debt": Number(10, 900, "po"),
    "income": Number(20, 999, "po"),
    "visits": Number(1, 90, "pl"),
    "price": Number(5, 900, "t", "most expensive", "cheapest"),
    "cost": Number(3, 999, "te", "most costly", "least costly"),
    "length": Number(5, 999, "t", "longest", "shortest"),
    "width": Number(5, 400, "t", "widest", "narrowest", "wider", "narrower"),
    "size": Number(1, 500, "tlo", "largest", "smallest", "larger", "smaller"),
    "speed": Number(20, 400, "pt", "fastest", "slowest", "faster", "slower"),
    "power": Number(40, 999, "t", "most powerful", "least powerful"),
    "stock": Number(0, 300, "t"),
    "quantity": Number(1, 99, "te"),
    "discount": Number(1, 70, "t"),
    "volume": Number(1, 600, "t"),
    "copies": Number(10, 900, "t"),
    "downloads": Number(10, 9999, "t"),
    "warranty": Number(1, 60, "t"),
    "voltage": Number(5, 400, "t"),
    "strength": Number(1, 99, "pt", "strongest", "weakest", "stronger", "weaker"),
    "rating": Number(1, 99, "ptleo", "best rated", "worst rated"),
    "year": Number(1950, 2024, "teo", "most recent", "earliest"),
    "capacity": Number(10, 900, "lt"),
    "population": Number(100, 9999, "l", "most populated", "least populated"),
    "area": Number(5, 999, "l"),
    "depth": Number(5, 999, "l", "deepest", "shallowest", "deeper", "shallower"),
    "altitude": Number(10, 4000, "l"),
    "temperature": Number(1, 45, "le", "hottest", "coldest", "hotter", "colder"),
    "distance": Number(2, 999, "le", "farthest", "nearest"),
    "rent": Number(30, 999, "l"),
    "floors": Number(1, 40, "l"),
    "rooms": Number(1, 300, "l"),
    "seats": Number(10, 900, "l"),
    "budget": Number(10, 999, "eo"),
    "revenue": Number(10, 9999, "eol", "most profitable", "least profitable"),
    "profit": Number(5, 999, "eo"),
    "attendance": Number(50, 9999, "e"),
    "duration": Number(1, 300, "et"),
    "votes": Number(1, 999, "pe"),
    "fee": Number(2, 300, "el"),
    "tickets": Number(5, 999, "e"),
    "participants": Number(2, 500, "e"),
    "damage": Number(1, 900, "e"),
    "delay": Number(1, 200, "e"),
    "members": Number(2, 900, "o"),
    "awards": Number(0, 50, "pot"),
    "branches": Number(1, 90, "o"),
    "shares": Number(10, 999, "o"),
}


def _category(kinds: str, values: str) -> Category:
    return Category(kinds, values.split())


CATEGORIES: dict[str, Category] = {
    "city": _category(
        "plo", "Paris London Berlin Madrid Rome Tokyo Boston Dallas Chicago Seattle Oslo Vienna Cairo Lima"
    ),
    "country": _category(
        "plo", "France England Germany Spain Italy Japan Canada Brazil Norway Egypt Peru China India Mexico"
    ),
    "state": _category("pl", "Texas Ohio Nevada Florida Oregon Kansas Utah Maine"),
    "region": _category("lo", "north south east west central"),
    "nationality": _category(
        "p", "French English German Spanish Italian Japanese Canadian Brazilian Chinese Indian Mexican"
    ),
    "gender": _category("p", "male female"),
    "language": _category("pt", "English French German Spanish Italian Japanese Chinese Hindi Arabic"),
    "position": _category("p", "senior junior assistant deputy chief"),
    "major": _category("p", "physics biology law economics chemistry music"),
    "degree": _category("p", "bachelor master doctorate diploma"),
    "hometown": _category("p", "Lyon York Bonn Milan Osaka Toronto Bergen Cusco"),
    "religion": _category("p", "christian muslim jewish buddhist hindu"),
    "party": _category("p", "liberal democratic republican labor independent"),
    "hobby": _category("p", "reading running cooking singing hiking"),
    "team_color": _category("po", "orange purple silver navy"),
    "blood_type": _category("p", "A B O AB"),
    "color": _category("t", "red blue green black white yellow gray brown"),
    "brand": _category("t", "Sony Ford Apple Nike Honda Dell Adidas Fiat"),
    "material": _category("t", "wood steel glass stone plastic leather"),
    "category": _category("t", "sport food travel fun health"),
    "genre": _category("te", "rock jazz pop folk classical drama comedy horror"),
    "manufacturer": _category("t", "Airbus Boeing Toyota Volvo Tesla Siemens"),
    "origin": _category("t", "local imported foreign national"),
    "shape": _category("t", "round square oval flat"),
    "fuel": _category("t", "diesel petrol electric hybrid"),
    "format": _category("t", "digital printed audio video"),
    "grade": _category("pt", "A B C D E"),
    "flavor": _category("t", "sweet sour bitter salty"),
    "style": _category("tl", "modern gothic baroque rustic minimal"),
    "type": _category("tleo", "public private mixed special basic premium"),
    "status": _category("tepo", "open closed pending active cancelled"),
    "level": _category("pte", "beginner advanced expert amateur"),
    "season": _category("e", "spring summer autumn winter"),
    "month": _category("e", "January March April June August October"),
    "day": _category("e", "Monday Tuesday Friday Sunday"),
    "outcome": _category("e", "win loss draw"),
    "payment": _category("e", "cash cheque transfer voucher"),
    "priority": _category("e", "urgent normal low"),
    "location": _category("le", "downtown seaside campus suburb village"),
    "climate": _category("l", "tropical dry arctic mild humid"),
    "continent": _category("l", "Europe Asia Africa America Oceania"),
    "county": _category("l", "Kent Essex Devon Surrey Norfolk"),
    "industry": _category("o", "retail finance media tourism software"),
    "headquarters": _category("o", "Geneva Zurich Dublin Houston Denver"),
    "division": _category("o", "northern southern eastern western"),
}

MODIFIERS = {
    "number": ["daily", "weekly", "net", "reported", "starting", "final", "annual", "monthly", "expected"],
    "category": ["home", "main", "birth", "official", "primary", "previous", "secondary", "work"],
}
"""What may stand before an attribute: ``annual_salary``, ``home_city``."""


def _split(names: str) -> list[str]:
    return names.split()


FIRST_NAMES = _split(
    "Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nina Oscar Paul Rosa Sam Tina "
    "Victor Wendy Adam Bella Carl Diana Eric Fiona George Helen Ivan Julia Kevin Laura Martin Nora Peter Ruth "
    "Simon Tom Zoe"
)
LAST_NAMES = _split(
    "Smith Jones Brown Garcia Miller Davis Wilson Moore Taylor Marsh Harris Clark Lewis Young Reid Wright Hill "
    "Cole Baker Adams"
)
ADJECTIVES = _split(
    "Red Silver Golden Blue Grand Royal North South East West Old Fresh Happy Silent Wild Bright Dark Green "
    "Little Great"
)
THINGS = _split(
    "River Star Moon Garden Bridge Lake Stone Tower Dream Valley Forest Light Heart Road Bay Harbor Crown "
    "Field Rose Eagle"
)
SYLLABLES = _split(
    "ba ce di fo gu ha jo ki lo ma ne po ra si ta vu wo xe ya zi bra cle dro flin gar mon nor pel quis ster tor vel"
)


def words() -> list[str]:
    """Every word of every name and value, sorted: what a tokenizer should hold as a whole."""
    names = [entity for entities in SUBJECTS.values() for entity in entities]
    names += [*NUMBERS, *CATEGORIES, *FIRST_NAMES, *LAST_NAMES, *ADJECTIVES, *THINGS]
    names += [name for group in MODIFIERS.values() for name in group]
    names += [value for category in CATEGORIES.values() for value in category.values]
    return sorted({word for name in names for word in name.split("_")})
