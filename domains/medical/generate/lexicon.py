"""The words of the generated medicine, each in English and in Chinese: names are invented, and sound it.

Names are made of syllables that have a character of their own, so that a drug is the same in both languages. Nothing
here is the name of a real drug, ingredient or disease, on purpose; what people feel (``dizziness``) are plain words.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "AILMENTS",
    "CAUSES",
    "CLASSES",
    "CONDITIONS",
    "DEPARTMENTS",
    "DIAGNOSES",
    "DOSAGES",
    "DRUG_ENDINGS",
    "IMAGES",
    "INGREDIENT_ENDINGS",
    "MEASURES",
    "PREVENTIONS",
    "STORAGES",
    "SYLLABLES",
    "SYMPTOMS",
    "Said",
]


class Said(NamedTuple):
    """A phrase in both languages."""

    en: str
    zh: str


def _said(text: str) -> tuple[Said, ...]:
    return tuple(Said(*line.strip().split(" | ")) for line in text.strip().splitlines())


SYLLABLES = _said("""
    ba | 巴
    du | 杜
    fo | 福
    ga | 加
    hu | 胡
    jo | 乔
    ka | 卡
    lu | 卢
    me | 梅
    no | 诺
    qui | 奎
    ro | 罗
    su | 苏
    ti | 蒂
    vo | 沃
    ze | 泽
""")
DRUG_ENDINGS = _said("""
    zorp | 佐普
    quell | 奎尔
    wump | 旺普
    plimsy | 普林西
    drax | 德拉克斯
    mundle | 蒙德
""")
INGREDIENT_ENDINGS = _said("""
    thrixate | 瑟里克斯盐
    blumic acid | 布卢酸
    fizzol | 菲佐醇
    glimmerine | 微光碱
""")
IMAGES = _said("""
    lantern | 灯笼
    echo | 回声
    velvet | 天鹅绒
    clockwork | 发条
    feather | 羽毛
    mirror | 镜面
    thistle | 飞蓟
    owl | 猫头鹰
    ribbon | 丝带
    pepper | 胡椒
    walnut | 核桃
    biscuit | 饼干
    umbrella | 雨伞
    kettle | 水壶
    button | 纽扣
    accordion | 手风琴
    snowglobe | 雪球
    marmalade | 果酱
""")
AILMENTS = _said("""
    fever | 热
    cough | 咳
    rash | 疹
    knee | 膝症
    ear | 耳症
    stomach | 胃症
    slumber | 嗜睡症
""")
CLASSES = _said("""
    glimmer blocker | 微光阻断剂
    echo damper | 回声抑制剂
    hum restorer | 嗡鸣恢复剂
    drift corrector | 漂移校正剂
    sparkle binder | 火花结合剂
    wobble stabilizer | 摇摆稳定剂
""")
SYMPTOMS = _said("""
    dizziness | 头晕
    a dry mouth | 口干
    itching skin | 皮肤瘙痒
    blue fingertips | 指尖发蓝
    ringing in the ears | 耳鸣
    loss of appetite | 食欲不振
    hiccups | 打嗝
    cold feet | 双脚发冷
    a metallic taste | 口中金属味
    sleepiness by day | 白天困倦
    blurred vision | 视物模糊
    stiff fingers | 手指僵硬
    night sweats | 夜间盗汗
    a hoarse voice | 声音嘶哑
    trembling hands | 双手颤抖
    sneezing fits | 阵发性喷嚏
    muscle cramps | 肌肉痉挛
    watery eyes | 流泪
    a swollen tongue | 舌头肿胀
    humming in the chest | 胸口嗡鸣
""")
CAUSES = _said("""
    moon moss spores | 月苔孢子
    the bite of the glass beetle | 玻璃甲虫叮咬
    cave dust | 洞穴尘埃
    fog from the silver marsh | 银沼雾气
    spoiled star plums | 变质的星梅
    too little starlight | 星光不足
    the whistling mite | 哨螨
    water from the humming well | 嗡鸣井水
""")
DEPARTMENTS = _said("""
    the department of hums | 嗡鸣科
    the department of drifts | 漂移科
    the department of glimmers | 微光科
    the department of wobbles | 摇摆科
    the department of echoes | 回声科
""")
DIAGNOSES = _said("""
    a glimmer scan | 微光扫描
    a hum recording | 嗡鸣记录
    a drift test | 漂移试验
    a feather test | 羽毛试验
    an echo map | 回声图
    a sparkle count | 火花计数
    a wobble curve | 摇摆曲线
    a lamp test | 灯光试验
""")
MEASURES = _said("""
    rest in a dark room | 在暗室休息
    warm compresses | 热敷
    salt baths | 盐浴
    slow breathing exercises | 缓慢呼吸练习
    a week of soup | 一周流食
    daily stretching | 每日伸展
    cool drinks | 饮用凉水
    an hour of quiet music | 听一小时轻音乐
""")
PREVENTIONS = _said("""
    a mask in caves | 进洞戴口罩
    boiled well water | 井水煮沸后饮用
    nets over the bed | 床上挂蚊帐
    an evening walk | 傍晚散步
    gloves when gathering moss | 采苔时戴手套
    fresh star plums only | 只吃新鲜星梅
    shutters closed in fog | 起雾时关窗
""")
CONDITIONS = _said("""
    pregnancy | 妊娠
    age under 6 years | 6岁以下
    age over 80 years | 80岁以上
    a weak glimmer gland | 微光腺功能不全
    hum disorders | 嗡鸣障碍
    allergy to moon moss | 月苔过敏
    severe wobble | 重度摇摆
    recent cave diving | 近期洞穴潜水
    fasting | 空腹
    a slow echo | 回声迟缓
""")
DOSAGES = _said("""
    1 tablet in the morning | 早晨1片
    2 tablets after supper | 晚饭后2片
    5 ml three times a day | 每日三次，每次5毫升
    10 drops before sleep | 睡前10滴
    1 capsule every 12 hours | 每12小时1粒
    half a tablet at noon | 中午半片
    20 ml once a week | 每周一次，每次20毫升
    3 lozenges a day | 每日3片含服
""")
STORAGES = _said("""
    below 25 degrees, away from light | 25度以下避光保存
    in a cold place of 2 to 8 degrees | 2至8度冷藏
    in a dry tin with its lid closed | 干燥铁盒内密闭保存
    at room temperature, out of drafts | 室温保存，避免穿堂风
""")
