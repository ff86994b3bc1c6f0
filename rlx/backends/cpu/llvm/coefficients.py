"""What elementary functions are made of: float formats and polynomials, which are minimax fits.

They come from Remez exchange at 200 bits and are then rounded.
"""

from __future__ import annotations

from typing import Literal

from rlx.records import dataclass

__all__ = ["EXP2", "FORMATS", "LN2_64", "NORMAL_ODDS", "TWO_OVER_PI", "DType", "Format"]

DType = Literal["f32", "f64"]
LN2_64 = 0.6931471805599453  # ln 2 rounded to f64


@dataclass(frozen=True)
class Format:
    """What the emitters need to know about a float format; polynomials have their lowest coefficient first."""

    scalar: str
    integer: str
    mantissa: int  # stored bits
    bias: int
    magic: float  # adding it rounds to an integer, which then stands in the low bits
    ln2: tuple[float, float]
    exp_range: tuple[float, float]  # beyond these exp is 0 and inf
    expm1_low: float  # below this expm1 is -1
    tanh_limit: float  # above this (of 2|x|) tanh is 1
    erf_limit: float  # above this erf is 1
    erf_split: float
    min_normal: float
    denormal_scale: int  # power of two that makes every subnormal normal
    sqrt_half: int  # bits of sqrt(1/2)
    exp: tuple[float, ...]  # (e^r - 1 - r) / r^2 on |r| <= ln2 / 2
    sin: tuple[float, ...]  # (sin(r) / r - 1) / z with z = r^2, on |r| <= pi/4
    cos: tuple[float, ...]  # (cos(r) - 1 + z/2) / z^2
    log: tuple[float, ...]
    tanh: tuple[float, ...]  # (tanh(x) / x - 1) / x^2 in x^2, on |x| <= 1/2; none where t / (t + 2) does
    erf_small: tuple[float, ...]  # erf(x) / x - 1 in x^2, on |x| <= erf_split
    erf_large: tuple[float, ...]  # log(1 - erf(x)), on erf_split .. erf_limit, weighted by 1 - erf(x)


# fmt: off
FORMATS: dict[str, Format] = {
    "f32": Format(
        scalar="float", integer="i32", mantissa=23, bias=127, magic=1.5 * 2.0**23,
        ln2=(0.6931471824645996, -1.9046542121259336e-09), exp_range=(-104.0, 89.0), expm1_low=-30.0,
        tanh_limit=40.0, erf_limit=4.0, erf_split=0.92, min_normal=2.0**-126, denormal_scale=24,
        sqrt_half=0x3F3504F3,
        exp=(0.5, 0.1666666716337204, 0.04166634380817413, 0.008333270438015461, 0.0013942039804533124,
             0.00019915483426302671),
        sin=(-0.16666653752326965, 0.00833213236182928, -0.00019510905258357525),
        cos=(0.04166664555668831, -0.0013887309469282627, 2.4431523343082517e-05),
        log=(0.3333331048488617, -0.24999986588954926, 0.20002147555351257, -0.16669218242168427, 0.14219991862773895,
             -0.12385497987270355, 0.11865280568599701, -0.11781047284603119, 0.06921135634183884),
        tanh=(-0.333333283662796, 0.13332973420619965, -0.05390019714832306, 0.02130267210304737,
              -0.0066550360061228275),
        erf_small=(0.12837916612625122, -0.37612634897232056, 0.11283694207668304, -0.02685927040874958,
                   0.005200634710490704, -0.000813744030892849, 8.345225069206208e-05),
        erf_large=(0.0001758630678523332, -1.1295207738876343, -0.633334755897522, -0.10829389095306396,
                   0.02512860670685768, -0.004174644593149424, 0.00043522095074877143, -2.1162246412131935e-05),
    ),
    "f64": Format(
        scalar="double", integer="i64", mantissa=52, bias=1023, magic=1.5 * 2.0**52,
        ln2=(LN2_64, 2.3190468138462996e-17), exp_range=(-746.0, 710.0), expm1_low=-60.0,
        tanh_limit=80.0, erf_limit=6.0, erf_split=1.0, min_normal=2.0**-1022, denormal_scale=53,
        sqrt_half=0x3FE6A09E667F3BCD,
        exp=(0.5, 0.16666666666666677, 0.041666666666666706, 0.008333333333320663, 0.001388888888886494,
             0.00019841269888873822, 2.4801587364291372e-05, 2.755724118131475e-06, 2.75572395820446e-07,
             2.511017341763435e-08, 2.0925420576514555e-09),
        sin=(-0.16666666666666627, 0.00833333333332134, -0.00019841269828905171, 2.7557313366078087e-06,
             -2.5050705358491964e-08, 1.589364853752355e-10),
        cos=(0.041666666666666595, -0.0013888888888872921, 2.4801587288662287e-05, -2.7557314099084684e-07,
             2.0875686970481837e-09, -1.1357684233496744e-11),
        log=(0.6666666666666724, 0.3999999999946788, 0.28571428732249154, 0.2222219949700907, 0.18183520718567905,
             0.1531507975932937, 0.1478634183868159),
        tanh=(),
        erf_small=(0.1283791670955126, -0.3761263890318375, 0.11283791670954885, -0.026866170645077875,
                   0.005223977624828431, -0.0008548326981425542, 0.0001205533113295582, -1.4925595772180906e-05,
                   1.64610084778027e-06, -1.6350396222864617e-07, 1.466032872274226e-08, -1.137495573607015e-09,
                   5.960685338520971e-11),
        erf_large=(-2.445179810167164e-08, -1.1283789495914485, -0.6366205740276809, -0.10277128646674445,
                   0.01912900883444064, 0.000200843135775786, -0.0016732643244372473, 0.0005508056718426945,
                   2.314140730352556e-05, -0.00011144772003337318, 6.507510677616602e-05, -2.4400046623555037e-05,
                   6.820868922557884e-06, -1.478671487560533e-06, 2.498573843000114e-07, -3.2447332937039455e-08,
                   3.135653255513303e-09, -2.1260680782823816e-10, 9.026686370744286e-12, -1.8053949384038528e-13),
    ),
}

# log2((1 - Phi(x)) / Phi(x)) / -x in x^2 up to 5.5^2 (beyond, it goes on growing), and (2^f - 1) / f on |f| <= 1/2
NORMAL_ODDS = (2.302208334659407, 0.10483739549143681, -9.552264957205035e-05, -0.00015922768706150303,
               1.1409431848506657e-05, -3.8127943723888257e-07, 5.104280033760796e-09)
EXP2 = (0.6931469775988565, 0.24022242084984843, 0.05550733743426903, 0.009671512657336501, 0.0013264727185865084)

# 2/pi as 64-bit words, most significant first, after one word of zeros
TWO_OVER_PI = (
    0, 0xA2F9836E4E441529, 0xFC2757D1F534DDC0, 0xDB6295993C439041, 0xFE5163ABDEBBC561, 0xB7246E3A424DD2E0,
    0x06492EEA09D1921C, 0xFE1DEB1CB129A73E, 0xE88235F52EBB4484, 0xE99C7026B45F7E41, 0x3991D639835339F4,
    0x9C845F8BBDF9283B, 0x1FF897FFDE05980F, 0xEF2F118B5A0A6D1F, 0x6D367ECF27CB09B7, 0x4F463F669E5FEA2D,
    0x7527BAC7EBE5F17B, 0x3D0739F78A5292EA, 0x6BFB5FB11F8D5D08, 0x56033046FC7B6BAB, 0xF0CFBC209AF4361D,
)
# fmt: on
